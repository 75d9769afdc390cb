"""The model, its KV memory, the slot table and the scheduler. Sees token ids, never text."""
