"""One line for each trainer: Hugging Face's Trainer and TRL, Accelerate, Lightning and Fabric."""
