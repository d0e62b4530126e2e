"""What happens to sampled tokens: stops now; beams, grammars and speculation have their place here."""
