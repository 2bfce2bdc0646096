"""What a site may promise of a model, and whether it is still true."""
