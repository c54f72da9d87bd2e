"""The reference model: typed decisions on an elastic Gemma 3n. Knows nothing of training, threads or publishing."""
