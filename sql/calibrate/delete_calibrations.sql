-- purpose: forget the maps that are fitted anew
-- grain:   the maps of a workload and model
-- inputs:  calibrations
-- parameters: $workload_digest, $model_digest

delete from calibrations
where workload_digest = $workload_digest and model_digest = $model_digest
