"""/v1/stream: many generations over one WebSocket (docs/websocket.md)."""
