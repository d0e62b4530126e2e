"""The intermediate representation: an fx graph of camshaft ops, its weights, and what a step feeds it."""
