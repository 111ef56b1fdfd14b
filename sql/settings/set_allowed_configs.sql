-- purpose: what batchloom's own connections set, even where SQL may change no setting
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set allowed_configs = [
    'TimeZone', 'arrow_large_buffer_size', 'enable_progress_bar', 'memory_limit', 'disabled_optimizers'
]
