"""The Textual chat. Threads (`workers`) run model and store; no array gets here."""
