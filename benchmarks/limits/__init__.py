"""What no framework can pass: loops without one, in as many processes at once."""
