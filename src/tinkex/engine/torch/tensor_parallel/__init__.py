"""One model over several GPUs: every rank has a part of each layer, and all compute the same passes."""
