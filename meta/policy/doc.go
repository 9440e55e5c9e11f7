// Package policy decides which entries of a full pool are missed least.
package policy
