// The page of a job server: the list of its jobs, or one job.

import { showJob } from "./job.js";
import { showList } from "./list.js";

if (location.pathname.startsWith("/jobs/")) showJob(location.pathname.slice("/jobs/".length));
else showList();
