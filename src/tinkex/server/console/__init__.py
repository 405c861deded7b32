"""The web console: pages rendered on the server, live by server-sent events, at the server's own port."""
