"""What measuring is made of; knows no environment and no collector."""
