"""The C++ of pairs, chunks and single tokens, and the library that it is compiled to."""
