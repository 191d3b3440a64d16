"""The Textual chat. The model and the store run in threads (`workers`); no array gets here."""
