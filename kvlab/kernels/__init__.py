"""Attention over a slot store. `reference` is the definition, in plain torch on any device. No policy names in here."""
