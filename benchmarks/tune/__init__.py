"""What writes the tables that ship: tiles, and AUTO's order."""
