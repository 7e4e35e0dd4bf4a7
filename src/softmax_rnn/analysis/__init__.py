"""Which powers of exp's series the heads of a trained model use."""
