"""From a JSON schema to a grammar for llguidance that allows exactly the JSON that fits it."""
