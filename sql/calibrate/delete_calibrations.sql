-- purpose: delete the maps that are about to be fitted again
-- grain:   the maps of a workload and model
-- inputs:  calibrations
-- parameters: $workload_digest, $model_digest

delete from calibrations
where workload_digest = $workload_digest and model_digest = $model_digest
