"""Files: read without being trusted, written so that they are whole or not there, locked, and appended to as logs."""
