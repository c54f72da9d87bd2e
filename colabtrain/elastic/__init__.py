"""How MM-Jev is trained: batches, objective, optimizer, step, evaluation. No disk, no network, no widgets."""
