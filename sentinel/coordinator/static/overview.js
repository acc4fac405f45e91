// Pages without pictures: only their parts are renewed.
import { follow } from "./live.js";

follow(null, null);
