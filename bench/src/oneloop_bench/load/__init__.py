"""The load test behind `oneloop bench serve`: a plain OpenAI client that works against any server.

A run goes through the files in this order: `workload` and `datasets` (what is asked), `arrivals` (when), `client` over
`connection` and `reply` (asking, and noting when what came), `processes` (several clients at once), `checks`,
`metrics`, `result` (what is told). None of them knows anything of oneloop's engine but `prompts`, for its tokenizers.
"""
