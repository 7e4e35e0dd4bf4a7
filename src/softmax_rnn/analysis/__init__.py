"""The heads of trained decoders, the evaluation of any model, and what a state can hold."""
