//go:build depskeep

// Package internal keeps requirements in go.mod while packages are being written.
package internal
