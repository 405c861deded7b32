"""WHO COMPUTES: a trainer and a sampler over one base model. No HTTP, no SQL, no users, no text."""
