"""What sets the rules by which a backend chooses one of its ways."""
