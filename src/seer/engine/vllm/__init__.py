# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM as an instance: one `AsyncLLM`, driven through its public extension points.

    this process                        vLLM's engine process
    VllmInstance  -- chunks -->         scheduler: SeerScheduler (drafts), SeerPoolConnector (which KV blocks move)
                  <- tokens, stats --   worker: SeerPoolConnector (moves them), SeerWorker (weights)

vLLM is not patched: it gets our classes by their dotted names. Importing this package, or its modules
`version`, `model_folder` and `settings`, does not import vLLM.
"""
