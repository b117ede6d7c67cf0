"""How the built-in model is made: its corpus, its tokenizer, its training and its evaluation."""
