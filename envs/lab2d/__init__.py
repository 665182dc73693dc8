"""Lab2d levels: those that dmlab2d ships, and custom ones."""
