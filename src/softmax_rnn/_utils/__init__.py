"""What every part stands on: files, messages, plain data."""
