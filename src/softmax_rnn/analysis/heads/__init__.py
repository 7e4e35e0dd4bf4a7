"""The heads of a trained decoder: which powers of exp's series they use. Start with analyze.py."""
