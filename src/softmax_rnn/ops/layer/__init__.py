"""The attention layer: projections around the operation, and the parts that it adds."""
