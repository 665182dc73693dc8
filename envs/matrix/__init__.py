"""The climbing game and penalty games, repeated."""
