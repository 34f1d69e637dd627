"""Stock vLLM as an instance: one `AsyncLLM`, driven through its public extension points.

    this process                        vLLM's engine process
    VllmInstance  -- chunks -->         scheduler: SeerScheduler (drafts), SeerPoolConnector (which KV blocks move)
                  <- tokens, stats --   worker: SeerPoolConnector (moves them), SeerWorker (weights)

Nothing is patched: classes are handed over by their dotted names. Importing this package does not import
vLLM; importing its modules does, except `version`, `folder` and `settings`.
"""
