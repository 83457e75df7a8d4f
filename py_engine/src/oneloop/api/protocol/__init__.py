"""Requests as clients send them → typed and checked values. Every refusal names the field."""
