-- purpose: delete the orders of rows that get a new one, and those of another template
-- grain:   one row per request key
-- inputs:  workload_row_layouts, chosen_rows
-- parameters: $workload, $template_digest

delete from workload_row_layouts
where workload = $workload
    and (
        template_digest <> $template_digest
        or request_key in (select list_value(*columns('^key_.*$')) from chosen_rows)
    )
