"""What goes where: the loader trace, its lint, and the match of both sides. No I/O."""
