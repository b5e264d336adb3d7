"""What ran and was right: the kit and `verify` at length, sanitizers, and the pages made of their results."""
