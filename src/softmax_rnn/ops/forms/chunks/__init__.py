"""Section 3.1 in chunks of tokens: operands, tables, one step, the loops over steps."""
