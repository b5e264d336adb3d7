"""C that is compiled on the machine that runs it: faster roads for what plain torch does too."""
