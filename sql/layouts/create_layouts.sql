-- purpose: the order of a prompt's parts that a night has chosen, of workloads with layout = "auto"
-- grain:   one row a workload
-- inputs:  none
-- parameters: none

create table if not exists workload_layouts (
    workload text,
    template_digest text,          -- of the prompt as the file has it: another one is chosen for anew
    part_order integer[],          -- numbers of the parts of the file's template, first to last, from 0
    template text,                 -- in this order
    num_computed_tokens bigint,    -- prompt tokens of the night's plan, of all workloads planned together
    num_written_tokens bigint,     -- the same with every template as it is written
    chosen_at timestamptz
)
