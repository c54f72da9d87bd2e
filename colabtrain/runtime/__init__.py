"""Background work that survives. Knows nothing of decisions, questions or Gemma."""
