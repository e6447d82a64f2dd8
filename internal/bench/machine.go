// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine is where the numbers come from.
type Machine struct {
	Kernel string `json:"kernel"`
	CPU    string `json:"cpu"`
	CPUs   int    `json:"cpus"`
	Go     string `json:"go"`
	// Load averages of the last minute.
	LoadStart float64 `json:"load_start"`
	LoadEnd   float64 `json:"load_end"`
}

func machine() (Machine, error) {
	m := Machine{CPUs: runtime.NumCPU(), Go: runtime.Version() + " " + runtime.GOARCH}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return m, fmt.Errorf("read kernel release: %w", err)
	}
	m.Kernel = unix.ByteSliceToString(u.Release[:])
	var err error
	if m.CPU, err = cpuModel(); err != nil {
		return m, err
	}
	m.LoadStart, err = load()
	return m, err
}

// cpuModel is the name of the first CPU, or the architecture where the kernel
// names none.
func cpuModel() (string, error) {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "", fmt.Errorf("read CPU model: %w", err)
	}
	defer f.Close()
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		name, value, _ := strings.Cut(scan.Text(), ":")
		if strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value), nil
		}
	}
	return runtime.GOARCH, scan.Err()
}

func load() (load float64, err error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, fmt.Errorf("read load average: %w", err)
	}
	if _, err := fmt.Sscan(string(b), &load); err != nil {
		return 0, fmt.Errorf("read load average %q: %w", b, err)
	}
	return load, nil
}
