-- purpose: the settings that batchloom's own connections may still set after the configuration is locked
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: none

set allowed_configs = [
    'TimeZone', 'arrow_large_buffer_size', 'enable_progress_bar', 'memory_limit', 'disabled_optimizers'
]
