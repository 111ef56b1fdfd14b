-- purpose: store the layout of a workload
-- grain:   one row
-- inputs:  workload_layouts
-- parameters: as the columns

insert into workload_layouts by name
select
    $workload as workload,
    $template_digest as template_digest,
    $part_order::integer[] as part_order,
    $template as template,
    $num_computed_tokens as num_computed_tokens,
    $num_written_tokens as num_written_tokens,
    now() as chosen_at
