"""How model families set reasoning apart from the answer: a file for each format, `FORMAT` in it."""
