"""The rewrites, one a file, each a pure function from Program to Program."""
