"""Trees of tensors, named generators, gradients, optimizers and errors: what every other package stands on."""
