"""The commands, which the program ``fastrack`` loads by the entry points of this distribution."""
