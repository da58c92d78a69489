"""What a person does with an encoder."""
