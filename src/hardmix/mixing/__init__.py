"""The paper's method, in the paper's order. Imports nothing but settings and errors."""
